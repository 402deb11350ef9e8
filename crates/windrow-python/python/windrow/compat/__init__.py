"""Stand-ins for packages whose place Windrow can take."""
