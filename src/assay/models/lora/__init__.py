"""LoRA adapters of embedded models: by name and hash, and their conversion from PEFT to GGUF."""
