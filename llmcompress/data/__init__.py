"""Text that comes with the package: `heldout.txt`, what the quickstart measures perplexity on.

It was written for this project and appears nowhere else; its authors give it to the public domain (CC0 1.0).
"""
