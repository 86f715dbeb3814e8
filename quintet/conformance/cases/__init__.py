"""Op cases of the conformance kit: shapes and arguments that each provider is compared on."""
