"""Drop-in replacements of packages."""
