"""The settings of an engine by concern, and the environment; `quintet.config` is their door."""
