"""What a run says about itself; everything here reads run folders alone."""
