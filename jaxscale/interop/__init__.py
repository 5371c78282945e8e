"""Other programs' formats: pure mappings of named arrays, in and out."""
