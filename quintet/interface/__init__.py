"""The platform contract: Platform, its data types, weights and stage channels; vendors import `quintet.contract`."""
