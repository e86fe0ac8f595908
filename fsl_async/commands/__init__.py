"""The commands of `fsl-node`: one file each, imported only when it is used."""
