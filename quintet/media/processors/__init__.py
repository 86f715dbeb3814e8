"""transformers' processors of media: their parts, what they make of one medium, and those of videos and of Voxtral."""
