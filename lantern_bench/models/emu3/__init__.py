"""Emu3 (arXiv 2409.18869): its prompts and sizes (`family`), and its tokenizer of videos (`tokenizer`)."""
