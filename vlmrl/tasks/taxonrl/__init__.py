"""TaxonRL (arXiv:2603.04380): its seven domains with ground truths, prompts, published rewards and drawn images."""
