"""Small populated databases, one for each revision that was ever released; every later program must open them."""
