"""GGUF, the file format of llama.cpp: a file is unpacked once into a model folder, which is all that other rooms see."""
