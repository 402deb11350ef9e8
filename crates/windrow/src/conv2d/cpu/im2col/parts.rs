//! The products of a video.

use super::Im2colGemm;
use crate::TensorRef;
use crate::conv2d::Conv2dConfiguration;
use crate::conv2d::cpu::staged::Staged;
use crate::conv2d::cpu::{Prepared, Run};

/// The products of the images of a video: those of each part read the same frames of the filter.
#[derive(Debug)]
pub(super) struct Parts {
    /// At least one.
    pub parts: Vec<Im2colGemm>,
}

impl Prepared for Parts {
    fn configuration(&self) -> Conv2dConfiguration {
        self.parts[0].configuration()
    }

    fn explain(&self) -> String {
        let largest = self.parts.iter().max_by_key(|part| part.stencil.pixels());
        let largest = largest.map(Im2colGemm::explain).unwrap_or_default();
        format!("{} parts, the largest with {largest}", self.parts.len())
    }

    fn packed_len(&self) -> usize {
        self.parts[0].packed_len()
    }

    fn packed_width(&self) -> usize {
        self.parts[0].packed_width()
    }

    fn workspace_bytes(&self) -> usize {
        self.parts.iter().map(Im2colGemm::workspace_bytes).max().unwrap_or(0)
    }

    fn tolerance(&self) -> f64 {
        self.parts[0].tolerance()
    }

    fn pack(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        self.parts[0].pack(w, packed);
    }

    fn run(&self, packed: &[f32], run: Run<'_, '_>) {
        let mut staged = Staged::new(run);
        for part in &self.parts {
            part.run_staged(packed, &mut staged);
        }
    }
}
