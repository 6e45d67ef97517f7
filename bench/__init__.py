"""Measures of a whole server, beside what the kernel allows and beside Docker: `dsec bench`, `make bench`."""
