"""Audio as models hear it: files become samples at 16 kHz, samples become pieces and log-mel features."""

SAMPLE_RATE = 16_000  # samples a second, of every array of samples behind the decoder
