"""The endpoints, a module for each family; each has a `router`."""
