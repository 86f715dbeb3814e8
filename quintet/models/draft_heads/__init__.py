"""Draft heads: small models that read the hidden states of another one, and propose the tokens that it draws next."""
