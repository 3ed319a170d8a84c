"""How the checkpoints that ship with Baton were made: text from a seed, a tokenizer, a training loop, an evaluation."""
