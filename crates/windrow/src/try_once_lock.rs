//! A lazily initialised value whose initialiser can fail (`OnceLock::get_or_try_init`, which is unstable).

use crate::Result;
use std::sync::OnceLock;

#[derive(Debug)]
pub(crate) struct TryOnceLock<T>(OnceLock<T>);

impl<T> Default for TryOnceLock<T> {
    fn default() -> Self {
        TryOnceLock(OnceLock::new())
    }
}

impl<T> TryOnceLock<T> {
    /// The value, made at the first call. An error is not kept: the next call tries again.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn get(&self, make: impl FnOnce() -> Result<T>) -> Result<&T> {
        if let Some(made) = self.0.get() {
            return Ok(made);
        }
        let made = make()?;
        Ok(self.0.get_or_init(|| made))
    }

    /// `None` before.
    pub(crate) fn made(&self) -> Option<&T> {
        self.0.get()
    }
}
