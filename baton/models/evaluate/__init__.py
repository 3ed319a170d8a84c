"""What a configuration of the engine is worth: text, recall, questions, continuations."""
