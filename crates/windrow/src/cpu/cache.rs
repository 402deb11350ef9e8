//! The size of the last-level cache.

use std::sync::LazyLock;

/// The size of the last-level cache in bytes, to predict whether an output will still be cached when it is read. 32 MiB
/// if the system does not report it (only Linux does).
pub(crate) fn last_level_cache() -> usize {
    static BYTES: LazyLock<usize> = LazyLock::new(|| {
        let sizes = (0..8).filter_map(|index| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
            parse(&std::fs::read_to_string(path).ok()?)
        });
        sizes.max().unwrap_or(32 << 20)
    });
    *BYTES
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
        assert!(last_level_cache() > 0);
    }
}
