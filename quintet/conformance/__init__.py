"""The conformance kit: proves that a platform keeps the contract of quintet/interface/platform.py."""
