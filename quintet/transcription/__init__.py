"""Whisper's decoding rules as pure functions: prompts, timestamps, segments, and the formats of transcripts."""
