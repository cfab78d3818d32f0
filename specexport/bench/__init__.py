"""`specexport bench`: speed under load, with speculation off, fixed and adaptive."""
