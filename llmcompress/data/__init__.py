"""Text that comes with the package: `heldout.txt`, what the quickstart measures perplexity on."""
