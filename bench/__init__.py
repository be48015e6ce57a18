"""recado side by side with its peers; see README.md in this folder."""
