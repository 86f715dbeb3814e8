"""What the commands that ask a server have behind them. Any OpenAI-compatible server will do, ours or another's."""
