//! The positions of tiles in the image.

use crate::conv2d::Problem;

/// The tiles of a problem in the order [n, tile row, tile column].
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub problem: Problem,
    /// Side of the output tile.
    pub m: usize,
    /// Rows and columns of tiles in an image.
    pub grid: [usize; 2],
}

/// Neighbouring tiles in one row of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub n: usize,
    /// Row and first column of tiles.
    pub row: usize,
    pub column: usize,
    /// Number of tiles.
    pub count: usize,
}

impl Geometry {
    pub(super) fn new(problem: &Problem, m: usize) -> Self {
        let grid = [problem.oh.div_ceil(m), problem.ow.div_ceil(m)];
        Geometry { problem: *problem, m, grid }
    }

    /// Tiles of the whole batch.
    pub(super) fn tiles(&self) -> usize {
        self.problem.n * self.grid[0] * self.grid[1]
    }

    /// Positions of a transformed tile.
    pub(super) fn positions(&self) -> usize {
        (self.m + 2) * (self.m + 2)
    }

    /// The longest segment that starts at `tile`, ends before `end` and has at most `columns` columns
    /// of outputs.
    #[inline(always)]
    pub(super) fn segment(&self, tile: usize, end: usize, columns: usize) -> Segment {
        let (rows, column) = (tile / self.grid[1], tile % self.grid[1]);
        let count = (end - tile).min(self.grid[1] - column).min(columns / self.m);
        Segment { n: rows / self.grid[0], row: rows % self.grid[0], column, count }
    }
}
