//! The sizes of caches.

use std::sync::LazyLock;

/// The size of the last-level cache in bytes, to predict whether an output will still be cached when it is read. 32 MiB
/// if the system does not report it (only Linux does).
pub(crate) fn last_level_cache() -> usize {
    static BYTES: LazyLock<usize> = LazyLock::new(|| {
        (0..8).filter_map(|index| number(index, "size")).max().unwrap_or(32 << 20)
    });
    *BYTES
}

/// The size of a core's second-level cache in bytes. 512 KiB if the system does not report it.
pub(crate) fn second_level_cache() -> usize {
    static BYTES: LazyLock<usize> = LazyLock::new(|| {
        let index = (0..8).find(|&index| number(index, "level") == Some(2));
        index.and_then(|index| number(index, "size")).unwrap_or(512 << 10)
    });
    *BYTES
}

/// A property of a cache of the first core.
fn number(index: usize, property: &str) -> Option<usize> {
    let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{property}");
    parse(&std::fs::read_to_string(path).ok()?)
}

/// Parses a size such as `512K`, `32M` or a number of bytes.
fn parse(size: &str) -> Option<usize> {
    let size = size.trim();
    let digits = size.trim_end_matches(['K', 'M', 'G']);
    let shift = match size.as_bytes().last()? {
        b'K' => 10,
        b'M' => 20,
        b'G' => 30,
        _ => 0,
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse("512K\n"), Some(512 << 10));
        assert_eq!(parse("32M"), Some(32 << 20));
        assert_eq!(parse("1G"), Some(1 << 30));
        assert_eq!(parse("100"), Some(100));
        assert_eq!(parse(""), None);
        assert_eq!(parse("K"), None);
        assert!(second_level_cache() > 0);
        assert!(last_level_cache() >= second_level_cache());
    }
}
