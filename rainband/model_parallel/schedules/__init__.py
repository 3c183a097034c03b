"""Pipeline schedules as tables: building, checking and playing them."""
