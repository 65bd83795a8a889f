"""Parts for gossamer in a package of their own, as a user would write them."""
