"""What a server is doing, in one value: for the live page, `marathon status` and `marathon top`."""
