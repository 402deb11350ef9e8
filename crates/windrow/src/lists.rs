//! Vectors whose length a problem decides. Where there is no memory for one, that is an error; a vector's own
//! methods would end the process.

use crate::{Device, Error, Result};

fn out_of_memory<T>(len: usize) -> Error {
    Error::OutOfMemory { device: Device::Cpu, bytes: len.saturating_mul(size_of::<T>()) }
}

/// An empty vector for `len` elements.
pub(crate) fn room_for<T>(len: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(len).map_err(|_| out_of_memory::<T>(len))?;
    Ok(list)
}

/// `len` times the same.
pub(crate) fn filled<T: Clone>(value: T, len: usize) -> Result<Vec<T>> {
    let mut list = room_for(len)?;
    list.resize(len, value);
    Ok(list)
}

/// Adds an element.
pub(crate) fn push<T>(list: &mut Vec<T>, item: T) -> Result<()> {
    list.try_reserve(1).map_err(|_| out_of_memory::<T>(list.len() + 1))?;
    list.push(item);
    Ok(())
}

/// The elements of an iterator as a list.
pub(crate) fn collected<T>(items: impl IntoIterator<Item = T>) -> Result<Vec<T>> {
    let items = items.into_iter();
    let mut list = room_for(items.size_hint().0)?;
    for item in items {
        push(&mut list, item)?;
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_what_was_asked_for() {
        assert_eq!(filled(1.5, 3), Ok(vec![1.5; 3]));
        assert_eq!(collected((0..9).filter(|i| i % 2 == 0)), Ok(vec![0, 2, 4, 6, 8]));
        assert_eq!(collected([1, 2]), Ok(vec![1, 2]));
        let mut list = Vec::new();
        push(&mut list, 7).unwrap();
        assert_eq!(list, [7]);
    }

    #[test]
    fn more_than_memory_holds_is_an_error() {
        let bytes = usize::MAX;
        let error = Error::OutOfMemory { device: Device::Cpu, bytes };
        assert_eq!(room_for::<f64>(usize::MAX), Err(error.clone()));
        assert_eq!(filled(0u8, usize::MAX), Err(error.clone()));
        assert_eq!(collected((0..usize::MAX).map(|_| 0u16)), Err(error));
    }
}
