"""Runs the helper on standard input and output."""

from fsl_async.nodes.reduction_helper.parent import main

main()
