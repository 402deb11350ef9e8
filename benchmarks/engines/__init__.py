"""The libraries compared. Each module has `versions()` and, by kind of case, functions that make the
timed calls: name -> call, which returns its result for the comparison with the others (or None)."""
