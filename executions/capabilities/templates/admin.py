"""Pages of templates."""
