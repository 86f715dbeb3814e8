"""A model's processor of media in a process of its own: it imports transformers, which a server's listener does not."""
