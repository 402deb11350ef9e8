//! The cache of compiled kernels on disk.

use crate::{Device, Result, folder};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

const MAGIC: &[u8; 8] = b"windrow1";

/// The maximum size in bytes of an entry that is read. Kernels have a few hundred thousand bytes.
const IMAGE_LIMIT: u64 = 256 << 20;

/// The folder of compiled kernels: `cuda` or `hip` in the user's cache folder. `None` if there is no such folder; then
/// every process compiles anew.
pub(super) fn directory(device: Device) -> Option<PathBuf> {
    folder::cache().map(|d| d.join(device.backend()))
}

/// The file name of a cache entry: a hash of everything that the compilation depends on.
pub(super) fn key<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = FNV_OFFSET;
    for part in parts {
        hash = fnv1a(hash, &(part.len() as u64).to_le_bytes());
        hash = fnv1a(hash, part.as_bytes());
    }
    format!("{hash:032x}")
}

/// The entry of `key`. If there is none, calls `make` and stores its result.
///
/// # Errors
/// Those of `make`.
pub(super) fn get_or_make(
    directory: Option<&Path>,
    key: &str,
    make: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    if let Some(image) = directory.and_then(|d| load(d, key)) {
        return Ok(image);
    }
    let image = make()?;
    if let Some(Err(error)) = directory.map(|d| store(d, key, &image)) {
        tracing::debug!(%error, "a compiled kernel was not cached");
    }
    Ok(image)
}

/// The entry of this key; `None` if there is none or it is damaged.
fn load(directory: &Path, key: &str) -> Option<Vec<u8>> {
    let bytes = folder::read(&directory.join(key), IMAGE_LIMIT).ok()?;
    let (header, image) = bytes.split_at_checked(MAGIC.len() + 16)?;
    let sound = header.starts_with(MAGIC) && header[MAGIC.len()..] == checksum(image);
    if !sound {
        tracing::warn!(key, "a damaged entry of the kernel cache is rebuilt");
    }
    sound.then(|| image.to_vec())
}

/// Writes an entry so that other processes see it whole or not at all.
fn store(directory: &Path, key: &str, image: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    std::fs::create_dir_all(directory)?;
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let partial = directory.join(format!("{key}.{}.{count}", std::process::id()));
    let write = || {
        let mut file = std::fs::File::create(&partial)?;
        file.write_all(MAGIC)?;
        file.write_all(&checksum(image))?;
        file.write_all(image)?;
        drop(file);
        std::fs::rename(&partial, directory.join(key))
    };
    write().inspect_err(|_| {
        let _ = std::fs::remove_file(&partial);
    })
}

const FNV_OFFSET: u128 = 0x6c62272e07bb014262b821756295c58d;

/// FNV-1a with 128 bits: no defence against an adversary, who could write to the cache anyway.
fn fnv1a(seed: u128, bytes: &[u8]) -> u128 {
    const PRIME: u128 = 0x0000000001000000000000000000013B;
    bytes.iter().fold(seed, |h, &b| (h ^ u128::from(b)).wrapping_mul(PRIME))
}

fn checksum(image: &[u8]) -> [u8; 16] {
    fnv1a(FNV_OFFSET, image).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("windrow-cache-{name}-{}", std::process::id()))
    }

    #[test]
    fn entries_come_back_and_damaged_ones_do_not() {
        let dir = scratch("damage");
        assert_eq!(load(&dir, "a"), None);
        store(&dir, "a", b"image").unwrap();
        assert_eq!(load(&dir, "a").as_deref(), Some(&b"image"[..]));
        let whole = std::fs::read(dir.join("a")).unwrap();
        for at in 0..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 1;
            std::fs::write(dir.join("a"), &bad).unwrap();
            assert_eq!(load(&dir, "a"), None, "byte {at} flipped");
            std::fs::write(dir.join("a"), &whole[..at]).unwrap();
            assert_eq!(load(&dir, "a"), None, "cut at {at}");
        }
        store(&dir, "a", b"image").unwrap();
        assert_eq!(load(&dir, "a").as_deref(), Some(&b"image"[..]));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn concurrent_writers_leave_a_whole_entry() {
        let dir = scratch("writers");
        let images = [vec![1u8; 100_000], vec![2u8; 50_000]];
        std::thread::scope(|s| {
            for image in &images {
                s.spawn(|| (0..20).for_each(|_| store(&dir, "k", image).unwrap()));
            }
            s.spawn(|| {
                for _ in 0..100 {
                    assert!(load(&dir, "k").is_none_or(|found| images.contains(&found)));
                }
            });
        });
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "no partial file is left");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_damaged_entry_is_made_again() {
        let dir = scratch("again");
        let image = |value: u8| get_or_make(Some(&dir), "k", || Ok(vec![value; 100])).unwrap();
        assert_eq!((image(1), image(2)), (vec![1; 100], vec![1; 100]));
        let whole = std::fs::read(dir.join("k")).unwrap();
        std::fs::write(dir.join("k"), &whole[..whole.len() / 2]).unwrap();
        assert_eq!((image(3), image(4)), (vec![3; 100], vec![3; 100]));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error_not_a_panic() {
        let file = scratch("file");
        std::fs::write(&file, b"").unwrap();
        assert!(store(&file, "k", b"image").is_err());
        assert_eq!(load(&file, "k"), None);
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn keys_separate_their_parts() {
        assert_ne!(key(["ab", "c"]), key(["a", "bc"]));
        assert_ne!(key(["a"]), key(["a", ""]));
        assert_eq!(key(["a", "b"]), key(["a", "b"]));
    }
}
