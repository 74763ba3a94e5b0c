"""TaxonRL (arXiv:2603.04380): its seven domains, their ground truths, prompts, published rewards and drawn data."""
