"""fsl-async: train large models across institutions."""
