"""Who may use the server: tenants, API keys, signatures."""
