"""Language models: one file per way of reaching them, and the catalog that opens them."""
