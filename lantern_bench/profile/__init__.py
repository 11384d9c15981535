"""What a decode step costs on this machine, and which draft trees pay."""
