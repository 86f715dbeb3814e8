"""One file per part of the contract; each registers its checks when it is imported."""
