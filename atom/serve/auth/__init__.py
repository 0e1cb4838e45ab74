"""Authentication: tenants, API keys, signatures."""
