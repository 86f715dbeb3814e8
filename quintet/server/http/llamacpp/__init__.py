"""llama.cpp's own routes (llama-server). Source: llama.cpp's repository, tools/server/README.md."""
