"""The life of engines and of the generations that outlive them."""
