"""From a request to records. No figures."""
