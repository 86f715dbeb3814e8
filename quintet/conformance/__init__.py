"""The conformance kit: proves that a platform keeps the contract of quintet/platforms/interface.py."""
