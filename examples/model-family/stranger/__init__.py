"""A model family for quintet: Llama with a learned vector behind each branch."""
