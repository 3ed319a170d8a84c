"""Stands in for cluster/leash.py in the negative control: becomes the command, without a tie to any parent."""

import os
import sys

os.execvp(sys.argv[3], sys.argv[3:])
