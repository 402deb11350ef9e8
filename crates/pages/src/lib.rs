//! The Rust examples of the pages: each page is the documentation of a constant here, whose code blocks are tests.

/// Pages with blocks of Rust, below the root.
macro_rules! pages {
    ($($name:ident $page:literal)*) => {
        $(
            #[cfg(doctest)]
            #[doc = include_str!(concat!("../../../", $page))]
            pub const $name: () = ();
        )*

        #[cfg(test)]
        const PAGES: &[&str] = &[$($page),*];
    };
}

pages! {
    README "README.md"
    BATCH_INVARIANCE "docs/batch-invariance.md"
    CANDLE "docs/candle.md"
    CAUSAL_CONV1D "docs/causal-conv1d.md"
    CONV2D "docs/conv2d.md"
    CONV3D "docs/conv3d.md"
    GELU "docs/gelu.md"
    PARALLEL "docs/parallel.md"
    TUNING "docs/tuning.md"
}

#[cfg(test)]
mod tests {
    use super::PAGES;
    use std::fs;
    use std::path::Path;

    #[test]
    fn every_page_with_rust_is_listed() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let docs = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().file_name());
        let docs = docs.map(|name| format!("docs/{}", name.to_string_lossy()));
        for page in docs.filter(|name| name.ends_with(".md")) {
            let text = fs::read_to_string(root.join(&page)).unwrap();
            let rust = text.lines().any(|line| line.starts_with("```rust"));
            assert_eq!(rust, PAGES.contains(&page.as_str()), "{page}");
        }
    }
}
