"""`python -m specexport`."""

from specexport.cli import main

main()
