"""Published models, against transformers and llama.cpp: REAL_MODELS names the folder that holds them."""
